"""The paper's tables and figures as configuration, with its values beside them; running them, and comparing."""

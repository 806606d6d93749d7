"""The report of runs: tables, figures and a page, from run folders alone."""

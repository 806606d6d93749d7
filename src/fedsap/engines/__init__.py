"""How clients are executed."""

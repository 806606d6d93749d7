"""Mistakes that the person at the keyboard can mend."""


class UserError(Exception):
    """Something the user gave does not fit: one line that says what it was, where, and what would be right.

    The command line prints it without a traceback and exits with status 2.
    """

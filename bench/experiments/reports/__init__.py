"""What experiments found: checks, tables and figures of larger ones."""

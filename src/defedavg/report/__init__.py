"""Reports of runs: tables for the terminal, figures, the report page and the live view."""

"""What a run is shown as: tables for the terminal, figures for paper."""

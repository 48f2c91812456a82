"""What a run is worth: measured, tabulated, drawn."""

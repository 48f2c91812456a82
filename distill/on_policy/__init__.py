"""Texts that a run makes for itself with the draft as it stands, and trains on until they are made anew."""

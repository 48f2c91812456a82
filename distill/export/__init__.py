"""A trained draft as a plain model directory, checked in a clean process."""

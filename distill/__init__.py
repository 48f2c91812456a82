"""Distil a draft on a target's logits, judge every checkpoint by real decoding, and export it."""

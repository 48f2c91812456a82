"""Rows, formats, examples, batches and their order. Knows nothing of losses, teachers or drafts."""

"""Drafts: their sizes, their first weights, their reduced vocabulary, how they are found on disk."""

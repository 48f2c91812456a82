"""A target that runs in a server: asked over HTTP, by exact token ids."""

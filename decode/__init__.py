"""Draftsmith's decoder: exact speculative decoding of any causal language model with a small draft."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.decoder import Generation, SpeculativeDecoder, StreamChunk

__all__ = ["Generation", "SpeculativeDecoder", "StreamChunk"]


def __getattr__(name: str) -> Any:
    """Import the decoder, and torch with it, only when it is asked for."""
    if name in __all__:
        import decode.decoder

        return getattr(decode.decoder, name)
    raise AttributeError(f"module 'decode' has no attribute {name!r}")

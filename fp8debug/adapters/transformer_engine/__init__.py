"""The adapter of Transformer Engine."""

from fp8debug.adapters.transformer_engine.adapter import TransformerEngine

__all__ = ["TransformerEngine"]

"""Quark as a quantizer inside other libraries; each module registers itself when it is imported."""

"""RLHF for clusters with tight memory: DeepSpeed ZeRO-3 trains, SGLang samples, Ray swaps the weights."""

__version__ = "0.1.0"

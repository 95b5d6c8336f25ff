"""bebop: faster RL post-training with MTP heads and lossless rejection sampling."""

__version__ = "0.1.0"

"""The version, written down once: pyproject.toml, manifests and ``nxd-ckpt --version`` have it from here."""

__version__ = "0.1.0"

"""Entry point of ``python -m nxd_ckpt.cli``, the same command as ``nxd-ckpt``."""

import sys

from nxd_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

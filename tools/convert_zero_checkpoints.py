"""NxD's ``nxd_convert_zero_checkpoints`` on top of nxd_ckpt; runs from a checkout, without installation.

``python tools/convert_zero_checkpoints.py --input_dir ckpt/step_300 --output_dir ckpt/step_300_dp8 --convert_to_sharded
--dp_size 8``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nxd_ckpt.cli.convert_zero_checkpoints import main

if __name__ == "__main__":
    sys.exit(main())

"""The logger of this package. There is one, so that users set its level by one name."""

import logging

logger: logging.Logger = logging.getLogger("nxd_ckpt")

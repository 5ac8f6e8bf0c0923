"""Conversions, on any CPU host and without a cluster.

Tags for other sizes, in other places or as one archive, from and to Hugging Face directories and torch DCP, and as
plain files of whole tensors.
"""

from nxd_ckpt.conversion.cp import Copy, copy_checkpoint
from nxd_ckpt.conversion.export import Export, export_checkpoint
from nxd_ckpt.conversion.importing import Import, import_checkpoint
from nxd_ckpt.conversion.job import Converted
from nxd_ckpt.conversion.pack import Packed, pack_checkpoint
from nxd_ckpt.conversion.reshard import convert_zero1, reshard
from nxd_ckpt.conversion.to_dcp import from_dcp, to_dcp
from nxd_ckpt.conversion.unshard import Unsharded, UnshardStrategy, unshard_checkpoint
from nxd_ckpt.migrate.migrate import Migration, migrate

__all__ = [
    "Converted",
    "Copy",
    "Export",
    "Import",
    "Migration",
    "Packed",
    "UnshardStrategy",
    "Unsharded",
    "convert_zero1",
    "copy_checkpoint",
    "export_checkpoint",
    "from_dcp",
    "import_checkpoint",
    "migrate",
    "pack_checkpoint",
    "reshard",
    "to_dcp",
    "unshard_checkpoint",
]

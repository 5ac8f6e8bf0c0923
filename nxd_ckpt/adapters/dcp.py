"""Tags as torch.distributed.checkpoint (DCP) reads and writes them. Importing this imports DCP."""

from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from nxd_ckpt.torch_dcp.storage_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]

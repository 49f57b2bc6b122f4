"""What survives a death: content-addressed blobs, and small documents that are replaced atomically."""

from collapipe.storage.blobs import BlobStore, JobStores, StoredBlob
from collapipe.storage.documents import read_document, write_document
from collapipe.storage.tensor_blob import TensorBlob, load_tensors

__all__ = [
    "BlobStore",
    "JobStores",
    "StoredBlob",
    "TensorBlob",
    "load_tensors",
    "read_document",
    "write_document",
]

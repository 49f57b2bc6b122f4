"""What survives a death: content-addressed blobs, and small documents that are replaced atomically."""

from collapipe.storage.blobs import BlobStore, JobStores, StoredBlob
from collapipe.storage.documents import read_document, write_document

__all__ = ["BlobStore", "JobStores", "StoredBlob", "read_document", "write_document"]

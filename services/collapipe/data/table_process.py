"""The process that reads a Parquet file or an Arrow stream, and writes its rows as lines of JSON.

A few kilobytes of such a file can stand for many gigabytes, and a wrong one can crash the library that reads it. So no service
reads it itself: this process has little memory, and only its own end is at stake.

The file is its standard input. Columns of bytes, such as pictures, are not read, because no task uses them. The first line that it
writes has the names of classes by column, each further line is a row, and the last line is a text: why reading ended, or "" at the
end of the file.

    python -m collapipe.data.table_process parquet < FILE
"""

import json
import resource
import sys
from collections.abc import Iterable, Iterator
from typing import Any

MEMORY_BYTES = 1 << 29
"""Most memory of this process."""
_BATCH_ROWS = 64
"""Rows that are decoded at once. All of them may have the longest value of the file."""
_BUFFER_BYTES = 1 << 20


def main() -> None:
    """Reads the file of standard input."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # Whatever the locale is.
    why = ""
    try:
        for line in _lines(sys.argv[1]):
            print(line)
    except MemoryError:
        why = f"it needs more than {MEMORY_BYTES} bytes of memory"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    print(json.dumps(why[:1000]))


def _lines(form: str) -> Iterator[str]:
    import pyarrow as pa  # type: ignore[import-untyped]  # An optional package.
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    schema: Any
    batches: Iterable[Any]
    if form == "parquet":
        # Otherwise, whole columns of a group of rows are in memory.
        file = pq.ParquetFile(sys.stdin.buffer, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        schema = file.schema_arrow
    else:
        # Its batches lie in the file, and only what is used of them gets into memory.
        file = pa.ipc.open_stream(pa.memory_map("/dev/stdin"))
        schema = file.schema
    left_out = {field.name: ["bytes", ""] for field in schema if _is_of_bytes(field.type)}
    columns = [name for name in schema.names if name not in left_out]
    if form == "parquet":
        batches = file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False)
    else:
        batches = (batch.select(columns) for batch in file)
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    found = features.get("info", {}).get("features", {})
    yield json.dumps({name: names for name in found if (names := _class_names(found[name]))})
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                yield json.dumps(left_out | row, ensure_ascii=False, default=_no_text)


def _is_of_bytes(kind: Any) -> bool:
    """Returns whether values of a type of Arrow are bytes, or contain nothing else but the path of their file."""
    inner = [kind.field(index) for index in range(kind.num_fields)]
    if not inner:
        return "binary" in str(kind).split("[")[0]
    return all(
        _is_of_bytes(field.type) for field in inner if len(inner) == 1 or field.name != "path"
    )


def _no_text(value: Any) -> list[str]:
    """Returns what stands for a value that JSON does not have, such as a date. It must not look like a text."""
    return [type(value).__name__, f"{value!s:.80}"]


def _class_names(feature: Any) -> list[str] | None:
    """Returns the names of classes of a feature of `datasets`, or of the items of a list."""
    while isinstance(feature, (dict, list)):
        if isinstance(feature, list):
            feature = feature[0] if feature else None
        elif feature.get("_type") == "ClassLabel":
            return list(feature["names"])
        else:
            feature = feature.get("feature")
    return None


if __name__ == "__main__":
    main()

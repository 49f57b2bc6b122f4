"""The texts of a file that a trained model is to answer."""

import os
from pathlib import Path

from collapipe.data.data_files import DataFile
from collapipe.data.findings import find_in_source
from collapipe.data.sources import ConllFile, RowSource, open_file
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig


def read_texts(path: Path, column: str) -> tuple[list[str], list[str]]:
    """Reads the texts of a column, or the lines of a .txt file, or the sentences of a .conll file, as they are.

    Returns:
        The texts, and what a person should know about how they were read.

    Raises:
        InvalidInputError: The file cannot be read, a row is wrong, or there is no text.
    """
    if not os.access(path, os.R_OK):
        raise InvalidInputError(
            f"{path} does not exist or may not be read: give a file of this machine"
        )
    source: RowSource
    if path.suffix.lower() == ".conll":
        source = ConllFile(DataFile(str(path), path))
    else:  # Rows of this kind need no labels.
        source = open_file(str(path), "causal_lm", DataConfig(text_column=column))
    try:
        texts = [row.texts[0] for row in source.read()]
    except InvalidInputError as error:
        # There is no job file here.
        raise InvalidInputError(str(error).replace("data.text_column", "--column")) from None
    if not any(text.strip() for text in texts):
        raise InvalidInputError(f"{path} has no text: put at least 1 in it")
    found = [str(finding) for finding in find_in_source(source.facts)]
    return texts, [line.replace("data.text_column", "--column") for line in found]

"""A hook of MkDocs: checks the links from docs/ to other files of the repository.

On a forge such a link opens the file. The built site does not contain the file, so the link becomes its path in code font.
"""

import re
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).parent.parent
_LINK_TO_A_FILE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links to files outside docs/; raises `FileNotFoundError` for a file that does not exist."""

    def replace(link: re.Match[str]) -> str:
        text, path = link.groups()
        if not (_REPOSITORY / path).exists():
            raise FileNotFoundError(
                f"docs/{page.file.src_uri} links to {path}, which does not exist"
            )
        return text if "`" in text else f"{text} (`{path}`)"

    return _LINK_TO_A_FILE.sub(replace, markdown)

"""Hooks of mkdocs.yml: the site shows files of the repository that are outside ``docs/``.

Documents link to each other by relative paths, so that the links work where the repository is browsed. These hooks make
the same links work in the site:

- `PAGES` become pages of the site.
- Any other file that a document links to becomes a page below ``source/`` that shows its text.
- A link to a folder leads to the page of its ``README.md``.
- A line ``<!-- include: FILE#ANCHOR -->`` is replaced by the text of that section of FILE.

A target that does not exist is left as it is; ``mkdocs build --strict`` then fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]

READMES = sorted((ROOT / "packages").glob("*/README.md"))

PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "examples/third-party-backend.md": "examples/third-party-backend/README.md",
    **{f"packages/{path.parent.name}.md": f"packages/{path.parent.name}/README.md" for path in READMES},
}
"""Path in the site -> path in the repository, for pages that are not in ``docs/``."""

HOME = "---\nhide:\n  - navigation\n---\n\n"
"""Metadata of the first page. It hides the navigation beside the page, which would have one entry."""

LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yml": "yaml",
    ".yaml": "yaml",
    ".json": "json",
    ".sh": "bash",
}

CODE = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`)", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
INCLUDE = re.compile(r"^<!-- include: (?P<path>[^\s#]+)#(?P<anchor>\S+) -->$", re.MULTILINE)
HEADING = re.compile(r"^(?P<level>#+) (?P<title>.+)$", re.MULTILINE)

slug = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the site that are not in ``docs/``."""
    for place, path in PAGES.items():
        head = HOME if place == "index.md" else ""
        files.append(File.generated(config, place, content=head + (ROOT / path).read_text()))
    for file in list(files.documentation_pages()):
        for path in _linked(file.content_string, _repository_path(file.src_uri)):
            place = _place(path)
            if place.startswith("source/") and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolves inclusions, and points links to places in the site."""
    own = page.file.src_uri
    if own.startswith("source/"):
        return markdown

    def included(match: re.Match[str]) -> str:
        return _relinked(_section(match["path"], match["anchor"]), match["path"], own)

    return INCLUDE.sub(included, _relinked(markdown, _repository_path(own), own))


def _repository_path(place: str) -> str:
    """The path in the repository of a page of the site."""
    return PAGES.get(place, f"docs/{place}")


def _place(path: str) -> str:
    """The place in the site of a path of the repository that exists."""
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return next((place for place, p in PAGES.items() if p == path), f"source/{path}.md")


def _source_page(path: str) -> str:
    """The page that shows a file of the repository."""
    text = (ROOT / path).read_text()
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=2))
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# {path}\n\n{fence}{language}\n{text}\n{fence}\n"


def _outside_code(text: str) -> list[tuple[bool, str]]:
    """`text` in parts, each with whether it is prose."""
    parts, end = [], 0
    for match in CODE.finditer(text):
        parts += [(True, text[end : match.start()]), (False, match[0])]
        end = match.end()
    return [*parts, (True, text[end:])]


def _target(link: re.Match[str], path: str) -> str | None:
    """The path in the repository that a link of the document at `path` leads to; None if there is no such file."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link["path"]))
    inside = not target.startswith("..") and (ROOT / target).exists()
    return target if inside and (ROOT / _readme_of(target)).exists() else None


def _readme_of(path: str) -> str:
    return posixpath.join(path, "README.md") if (ROOT / path).is_dir() else path


def _linked(text: str, path: str) -> list[str]:
    """The paths in the repository that a document links to or includes."""
    prose = "".join(part for is_prose, part in _outside_code(text) if is_prose)
    found = [target for link in LINK.finditer(prose) if (target := _target(link, path)) is not None]
    for match in INCLUDE.finditer(prose):
        found += _linked(_section(match["path"], match["anchor"]), match["path"])
    return found


def _relinked(text: str, path: str, own: str) -> str:
    """`text` of the document at `path`, with links that lead from the page `own` to pages of the site."""

    def replaced(link: re.Match[str]) -> str:
        target = _target(link, path)
        if target is None:
            return link[0]
        return posixpath.relpath(_place(target), posixpath.dirname(own) or ".") + (link["anchor"] or "")

    return "".join(LINK.sub(replaced, part) if is_prose else part for is_prose, part in _outside_code(text))


def _section(path: str, anchor: str) -> str:
    """The text under the heading of a document that has this anchor, without the heading.

    Raises:
        PluginError: no heading has it.
    """
    text = (ROOT / path).read_text()
    headings = list(HEADING.finditer(text))
    for i, heading in enumerate(headings):
        if slug(heading["title"], "-") == anchor:
            after = (h.start() for h in headings[i + 1 :] if len(h["level"]) <= len(heading["level"]))
            return text[heading.end() : next(after, len(text))].strip()
    raise PluginError(f"{path} has no section #{anchor} to include")

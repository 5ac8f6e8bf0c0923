"""The documentation site: pages from outside docs/, and the reference from docstrings and --help. A hook of mkdocs.

Links between files of the repository work as they stand, so that docs/ can be read without a site. Here they are led to
the pages.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from nxd_ckpt.cli.main import parsers

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("examples/*.py"))
DECISIONS = sorted(REPOSITORY.glob("docs/decisions/*.md"))
OUTSIDE = {
    "README.md": "introduction.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "licence.md",
    "SECURITY.md": "security.md",
    "tests/README.md": "tests.md",
    "tests/counts.md": "counts.md",
    "docs/decisions": "decisions/index.md",
    "examples": "examples/index.md",
    **{path: str(Path(path).with_suffix(".md")) for path in EXAMPLES},
}
"""The page of everything in the repository that is linked to and is no page of docs/."""
REFERENCE = {
    "nxd_ckpt": "Saving and loading",
    "nxd_ckpt.verify": "Verifying",
    "nxd_ckpt.prune": "Removing and pinning",
    "nxd_ckpt.dcp": "As torch DCP",
    "nxd_ckpt.errors": "Exceptions",
    "nxd_ckpt.storage.base": "The interface of storages",
    "nxd_ckpt.testing": "Tests of your own",
}
"""Title of each module's page in the reference."""
MODULES = {f"{module.replace('.', '/')}.py": f"reference/{module}.md" for module in REFERENCE}
MODULES["nxd_ckpt/__init__.py"] = "reference/nxd_ckpt.md"
"""The page of each of these modules whose file is linked to."""

_LINK = re.compile(
    r"^```.*?^```$|(?<=\]\()[^)\s#]+|(?<=src=\")[^\"]+|(?<=srcset=\")[^\"]+", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"<!--.*?-->")  # for tests; mkdocs would see references in it
_COMMAND = re.compile(r"^## `nxd-ckpt ([\w-]+)`\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}  # argparse's help is the same on any terminal


def on_config(config: MkDocsConfig) -> None:
    """Add to the navigation what is generated."""
    sections = {title: pages for entry in config.nav or [] if isinstance(entry, dict) for title, pages in entry.items()}
    sections["Train"].append(
        {"Examples": ["examples/index.md", *({Path(path).name: OUTSIDE[path]} for path in EXAMPLES)]}
    )
    sections["Know"].append({"Reference": [{title: f"reference/{module}.md"} for module, title in REFERENCE.items()]})
    records = [f"decisions/{path.name}" for path in DECISIONS]
    sections["Know"].append({"Decisions": ["decisions/index.md", *records]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are not in docs/."""
    pages = {page: _as_page(REPOSITORY / path) for path, page in OUTSIDE.items()}
    pages |= {f"reference/{module}.md": _reference(module, title) for module, title in REFERENCE.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead each link to the page of the file that it names."""
    here = page.file.src_uri
    if here == "cli.md":
        markdown = _COMMAND.sub(_with_options, markdown)
    origin = next((path for path, at in OUTSIDE.items() if at == here), f"docs/{here}")
    return _LINK.sub(lambda link: _led(link[0], origin, here), _COMMENT.sub("", markdown))


def _with_options(section: re.Match[str]) -> str:
    """Return the section of a command with its --help at the end."""
    return f"{section[0].rstrip()}\n\n```text\n{parsers()[1][section[1]].format_help()}```\n\n"


def _led(link: str, origin: str, here: str) -> str:
    if "://" in link or link.startswith("```"):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    place = (OUTSIDE | MODULES).get(target, target.removeprefix("docs/"))
    return posixpath.relpath(place, posixpath.dirname(here) or ".")


def _as_page(path: Path) -> str:
    if path.is_dir():
        titles = {file.name: _title(file) for file in sorted((*path.glob("*.md"), *path.glob("*.py")))}
        links = (f"- [{title}]({path.name}/{name})\n" for name, title in titles.items())
        return f"# {path.name.title()}\n\n" + "".join(links)
    if path.suffix == ".py":
        return f"# {path.name}\n\n```python\n{path.read_text()}```\n"
    return path.read_text() if path.suffix == ".md" else f"# {path.name}\n\n```text\n{path.read_text()}```\n"


def _title(file: Path) -> str:
    return file.read_text().partition("\n")[0].lstrip("# ") if file.suffix == ".md" else file.name


def _reference(module: str, title: str) -> str:
    named = import_module(module)
    classes = [name for name, kind in inspect.getmembers(named, inspect.isclass) if kind.__module__ == module]
    names = getattr(named, "__all__", classes)
    shown = [name for name in names if not name.startswith("__") and name != "errors"]
    return f"# {title}: `{module}`\n\n" + "".join(f"::: {module}.{name}\n\n" for name in shown)


class Options(griffe.Extension):  # type: ignore[misc]
    """Shows each option of a function in the place of ``**options``, as ``help()`` does."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Take signature and docstring from the function itself, if a decorator makes them."""
        if not any(str(decorator.value).startswith("takes(") for decorator in func.decorators):
            return
        named: Any = import_module(func.module.path)
        for name in func.path.removeprefix(f"{func.module.path}.").split("."):
            named = getattr(named, name)
        if func.docstring is None:
            return  # of a constructor, which the class describes
        func.docstring.value = inspect.getdoc(named) or ""
        declared = [one for one in func.parameters if one.kind is not griffe.ParameterKind.var_keyword]
        known = {one.name for one in declared}
        options = [one for one in inspect.signature(named).parameters.values() if one.name not in known]
        func.parameters = griffe.Parameters(*declared, *map(_parameter, options))


def _parameter(option: inspect.Parameter) -> griffe.Parameter:
    return griffe.Parameter(
        option.name,
        annotation=str(option.annotation),
        kind=griffe.ParameterKind.keyword_only,
        default=repr(option.default),
    )

"""The pages for browsers: what is served, to which clients, under which policy, and that nothing else loads."""

from __future__ import annotations

import re
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.pages import FOLDER, KINDS
from holdfast.gateway.settings import Network
from holdfast.tests.gateway.test_browsers import app_of, asked

pytestmark = pytest.mark.anyio

FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in KINDS)
SCRIPTS = [name for name in FILES if name.endswith(".js")]  # ours: those of `vendor/` end in .mjs


class Tags(HTMLParser):
    """The tags of a page with their attributes, and the text in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline += data.strip()


def page(name: str) -> Tags:
    return Tags((FOLDER / name).read_text())


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_is_served_under_a_policy_that_lets_it_load_only_from_here(path: str) -> None:
    status, headers, body = await asked(app_of(), "GET", path)
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert {sources for name, sources in policy.items() if name.endswith("-src")} == {"'none'", "'self'"}
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert body.startswith(b"<!doctype html>")


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_as_what_it_is(name: str) -> None:
    if name.endswith(".html"):
        return
    status, headers, body = await asked(app_of(), "GET", f"/page/{name}")
    assert (status, headers["content-type"]) == (200, KINDS[Path(name).suffix])
    assert body == (FOLDER / name).read_bytes() and "content-security-policy" in headers
    known = await asked(app_of(), "GET", f"/page/{name}", If_None_Match=headers["etag"])
    assert known[0] == 304 and not known[2]
    assert (await asked(app_of(), "GET", f"/page/{name}", If_None_Match='"another"'))[0] == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd"]
)
async def test_nothing_else_is_served(path: str) -> None:
    assert (await asked(app_of(), "GET", path))[0] == 404
    assert (await asked(app_of(), "POST", "/"))[0] == 405


@pytest.mark.parametrize("name", ["index.html", "docs.html"])
def test_a_page_has_no_script_or_style_inside_and_links_only_to_files_that_are_there(name: str) -> None:
    read = page(name)
    assert read.inline == ""
    for tag, attributes in read.tags:
        assert not any(one.startswith("on") or one == "style" for one in attributes), (tag, attributes)
        for one in ("href", "src"):
            target = attributes.get(one)
            if target is None or tag == "base":
                continue
            assert not re.match(r"\w+:|//", target), target
            assert not target.startswith("/"), "it would leave the prefix of a proxy"
            if target.startswith("page/"):
                assert (FOLDER / target.removeprefix("page/")).exists(), target


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_import_only_what_is_there_and_evaluate_no_text(name: str) -> None:
    text = (FOLDER / name).read_text()
    for target in re.findall(r'from "([^"]+)"', text):
        assert target.startswith("./") and (FOLDER / target).exists(), target
    assert not re.search(
        r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text
    )
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_libraries_are_those_of_their_packages_to_the_byte() -> None:
    """By the sums that stand beside their versions."""
    listed = re.findall(r"^\| `([\w.-]+)` .*\| (\w{64}) \|$", (FOLDER / "vendor/README.md").read_text(), re.M)
    assert {f"vendor/{name}" for name, _ in listed} == {name for name in FILES if name.endswith(".mjs")}
    for name, digest in listed:
        assert sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("name", ["index.html", "docs.html"])
def test_ids_that_scripts_name_are_in_the_page(name: str) -> None:
    ids = [attributes["id"] for _, attributes in page(name).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    scripts = (
        ["docs.js"] if name == "docs.html" else [one for one in SCRIPTS if one not in ("docs.js", "theme.js")]
    )
    named = {
        found for one in scripts for found in re.findall(r'byId\("([\w-]+)"\)', (FOLDER / one).read_text())
    }
    assert named <= set(ids)
    for _, attributes in page(name).tags:
        for one in ("for", "aria-labelledby", "aria-describedby", "aria-controls"):
            assert attributes.get(one) is None or attributes[one] in ids, attributes


async def test_pages_need_no_key_and_say_nothing_of_the_server() -> None:
    app, other = app_of(api_key="s3cret"), app_of()
    for path in ("/", "/docs", "/page/app.js", "/openapi.json", "/asyncapi.json"):
        with_keys = await asked(app, "GET", path)
        assert with_keys[0] == 200
        assert with_keys[2] == (await asked(other, "GET", path))[2], "the same as on any server"
    for path in ("/v1/models", "/metrics", "/version", "/docs/", "/page", "/pages"):
        assert (await asked(app, "GET", path))[0] == 401


async def test_a_name_that_is_not_the_servers_gets_no_page() -> None:
    assert (await asked(app_of(), "GET", "/", host="evil.example"))[0] == 403


async def test_the_pages_can_be_switched_off() -> None:
    app = app_of(page=False)
    for path in ("/", "/docs", "/page/app.js"):
        assert (await asked(app, "GET", path))[0] == 404
    for path in ("/openapi.json", "/asyncapi.json", "/health"):
        assert (await asked(app, "GET", path))[0] in (200, 503)


async def test_behind_a_prefix_links_begin_there() -> None:
    app = app_of(network=Network(root_path="/holdfast"))
    for path in ("/holdfast/", "/holdfast", "/holdfast/docs"):
        status, _, body = await asked(app, "GET", path)
        assert status == 200 and b'<base href="/holdfast/" />' in body
    assert (await asked(app, "GET", "/holdfast/page/app.js"))[0] == 200
    assert b'<base href="./" />' in (await asked(app_of(), "GET", "/"))[2]

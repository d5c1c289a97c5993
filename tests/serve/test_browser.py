"""The page in a real browser: it loads, asks, and shows what the server writes."""

from __future__ import annotations

import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_continues_a_text(server, tmp_path):
    server.ask("POST", "/v1/states", {"name": "a <b>book</b>", "text": "the state"})
    picture = tmp_path / "page.png"
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    flags += ["--virtual-time-budget=20000"]
    url = f"http://127.0.0.1:{server.port}/?prompt=the&tokens=12&go=1"
    dump = [CHROMIUM, *flags, "--dump-dom", url]
    page = subprocess.run(dump, capture_output=True, text=True, timeout=90).stdout
    assert '<small id="model">tiny</small>' in page
    assert " pieces in " in page  # the stream came to its end
    assert "a &lt;b&gt;book&lt;/b&gt; (" in page and "<b>book" not in page
    shot = [CHROMIUM, *flags, f"--screenshot={picture}", url]
    subprocess.run(shot, capture_output=True, timeout=90, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")

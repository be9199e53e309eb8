"""Takes the pictures of README and docs: ``python -m tests.dashboard.screenshots``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from fp8debug_dashboard.sharing.report import write_report
from tests.conftest import CHROMIUM
from tests.dashboard import samples
from tests.dashboard.serving import browser_args, served

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "img"
#: name -> (address, dark or light)
PICTURES = {
    "overview": ("/?run=gpt-delayed", "light"),
    "overview-dark": ("/?run=gpt-delayed", "dark"),
    "heatmap": ("/heatmap?run=gpt-delayed", "light"),
    "model": ("/model?run=gpt-delayed", "light"),
    "module": (f"/module?run=gpt-delayed&module={samples.SICK}&step=300", "light"),
    "ranks": ("/ranks?run=gpt-ranks", "light"),
    "findings": ("/findings?run=gpt-delayed", "light"),
    "fallback": ("/fallback?run=gpt-delayed", "light"),
    "compare": ("/compare?run=gpt-delayed&with=gpt-blockwise", "light"),
    "runs": ("/", "light"),
}


def take(page: Page, address: str, path: Path) -> None:
    """Wait until a page has drawn everything, then write it as it is, no higher than its content."""
    page.goto(address)
    page.locator(".page").wait_for(timeout=30_000)
    page.locator(".pulse").first.wait_for(state="detached", timeout=60_000)
    page.get_by_text("triage is running").first.wait_for(state="detached", timeout=60_000)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(1500)
    bottom = page.locator(".page > :last-child").bounding_box()
    assert bottom is not None
    height = min(1400, int(bottom["y"] + bottom["height"]) + 12)
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": 1440, "height": height})


def take_report(page: Page, run: Path, path: Path) -> None:
    """Write the picture of a run's report, the top of it."""
    target = write_report(run, path.with_suffix(".html"))
    page.goto(Path(target).resolve().as_uri())
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": 1000, "height": 1400}, full_page=True)
    Path(target).unlink()


def main() -> None:
    """Write every picture to docs/img; with a folder as argument write every page there, light and dark."""
    pictures, images = PICTURES, IMAGES
    if sys.argv[1:]:
        images = Path(sys.argv[1]).resolve()
        names = [name for name in PICTURES if not name.endswith("-dark")]
        pictures = {f"{name}-{scheme}": (PICTURES[name][0], scheme) for name in names for scheme in ("light", "dark")}
    images.mkdir(parents=True, exist_ok=True)
    home, root = Path.cwd(), Path("runs")
    os.chdir(tempfile.mkdtemp())  # the pages print commands with the path as it was given
    samples.write_sick(root / "gpt-delayed")
    samples.write_dump(root / "gpt-delayed")
    samples.write_verify(root / "gpt-delayed")
    samples.write_ranks(root / "gpt-ranks")
    samples.write_healthy(root / "gpt-blockwise", num_steps=samples.NUM_STEPS, every=samples.EVERY, modules=samples.gpt_modules())
    try:
        with served(root) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=browser_args())
            for name, (place, scheme) in pictures.items():
                dark = scheme == "dark"
                page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="dark" if dark else "light")
                take(page, address + place, images / f"{name}.png")
                page.close()
                print(f"Wrote {name}.png to {images}")
            take_report(browser.new_page(viewport={"width": 1000, "height": 900}), root / "gpt-delayed", images / "report.png")
            print(f"Wrote report.png to {images}")
            browser.close()
    finally:
        shutil.rmtree(Path.cwd())
        os.chdir(home)


if __name__ == "__main__":
    main()

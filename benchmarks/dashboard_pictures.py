"""Pictures of the dashboard for docs/service.md: a search as it goes on, and the plan that it finds.

    python benchmarks/dashboard_pictures.py [--budget 30s]

Starts a service of its own, submits T5-3B, and photographs its page in Chromium (apt-get install chromium) when more
than half of the budget is spent and when the plan is there. Writes docs/pictures/dashboard-*.png.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from service.client import AutomapClient
from service.command.demo import started_service

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH, SEARCH, PLAN = 960, 790, 1230
"""Pixels: the width of both pictures and the height of each."""
HALF = 0.6
"""Share of the budget at which the search is photographed."""


def main() -> None:
    """Takes both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="30s")
    budget = parser.parse_args().budget
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser_path is None:
        parser.error("Chromium is needed: apt-get install chromium")
    with (
        tempfile.TemporaryDirectory() as folder,
        started_service(Path(folder) / "service.log") as url,
        AutomapClient(url) as client,
        sync_playwright() as driver,
    ):
        job = client.submit("zoo:t5-3b", "2x8xV100-32GB@25Gbit", {"global_batch": 128}, budget=budget)
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": SEARCH}, color_scheme="light")
        page.set_default_timeout(120_000)
        page.goto(f"{url}/#/jobs/{job['id']}")
        for event in client.watch(job["id"]):
            if (event.data.get("fraction") or 0.0) > HALF:
                break
        page.locator("svg.chart").wait_for()
        page.screenshot(path=PICTURES / "dashboard-search.png")
        page.locator("figure img").first.wait_for()
        page.set_viewport_size({"width": WIDTH, "height": PLAN})
        page.get_by_role("heading", name="Plan").first.evaluate("one => one.scrollIntoView()")
        page.screenshot(path=PICTURES / "dashboard-plan.png")
        browser.close()


if __name__ == "__main__":
    main()

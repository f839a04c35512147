"""The dashboard in a real browser: from the form to the plan and a file; without a request to anybody else."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from service_work import run
from tiny_file import mlp

from agents.searcher import Progress, Reached
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.gnn.made_up import Shape, make_problem
from service.jobs import one_run
from service.jobs.keys import Keys
from service.jobs.store import Store
from service.jobs.worker import Worker
from service.settings import Settings

GPT = "gpt:layers=4,hidden=256,heads=4,vocab_size=1024,seq_len=128"
FOLDER = Path(__file__).resolve().parents[2] / "service" / "http" / "dashboard"

HEARD = """addEventListener("DOMContentLoaded", () => {
  globalThis.heard = [];
  const announcer = document.getElementById("announcer");
  new MutationObserver(() => heard.push(announcer.textContent)).observe(announcer, { childList: true });
})"""
"""Keeps what is said to those who cannot see the page."""


def test_its_files_are_served_strictly(api: httpx.Client) -> None:
    page = api.get("/")
    assert page.headers["content-type"].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="([^#"]+)"', page.text))
    assert {"dashboard/app.js", "dashboard/style.css"} <= named
    assert named <= {f"dashboard/{path.name}" for path in FOLDER.iterdir()}
    for path in FOLDER.iterdir():
        answer = api.get(f"/dashboard/{path.name}")
        assert answer.content == path.read_bytes()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert api.get(f"/dashboard/{path.name}", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
        for imported in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert (FOLDER / imported).exists()
    assert api.get("/dashboard/..%2f__init__.py").status_code == 404
    assert api.get("/dashboard/app.py").status_code == 404


def luminance(colour: str) -> float:
    """Relative luminance of `#rgb` or `#rrggbb`, 0..1 (WCAG 2.2)."""
    digits = colour.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, 1 to 21 (WCAG 2.2)."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_its_colours_can_be_told_from_their_ground() -> None:
    """Texts by 4.5:1, edges of controls and lines of pictures by 3:1 (WCAG 2.2, 1.4.3 and 1.4.11), in both schemes."""
    style = (FOLDER / "style.css").read_text()
    schemes = [
        dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    lines = re.findall(r'\["(#\w{6})", "', (FOLDER / "chart.js").read_text())
    assert len(schemes) == 2 and len(lines) == 7
    for colours in schemes:
        for ground in (colours["ground"], colours["panel"]):
            assert all(contrast(colours[name], ground) >= 4.5 for name in ("text", "quiet", "link", "wrong"))
            assert all(contrast(colours[name], ground) >= 3.0 for name in ("edge", "accent"))
        assert all(contrast(line, colours["ground"]) >= 3.0 for line in lines)


def told(number: int) -> Progress:
    members = {
        "expert": Reached(evaluations=10 * number, best_step_time_s=0.9),
        "mcmc": Reached(evaluations=100 * number, best_step_time_s=0.9 - 0.01 * number),
    }
    return Progress(
        searcher="mcmc", evaluations=110 * number, seconds=0.5 * number, best_step_time_s=0.9 - 0.01 * number,
        lower_bound_s=0.4, fraction=number / 20, members=members,
    )  # fmt: skip


@pytest.mark.slow
def test_from_the_form_to_the_plan(
    browser: Any, api: httpx.Client, store: Store, client: redis.Redis, until: Any, tmp_path: Path
) -> None:
    context = browser.new_context(color_scheme="dark", accept_downloads=True, viewport={"width": 1100, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    faults: list[str] = []
    asked: list[str] = []
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda fault: faults.append(str(fault)))
    page.on("request", lambda request: asked.append(request.url))
    may_end = threading.Event()

    def search(problem: Any, budget: Any, *, on_progress: Any, **rest: Any) -> Any:
        from agents import search_offer

        on_progress(told(1))
        for _ in range(600):
            if may_end.wait(0.05):
                break
            on_progress(told(10))
        return search_offer(problem, budget, on_progress=on_progress, **rest)

    def work() -> None:
        (job,) = until(store.active)
        run(job.id, client, search=search)

    page.goto(str(api.base_url))
    page.get_by_role("link", name="Start a search.").click()
    # A request that is refused says where: the field has the focus, and says that it is wrong.
    page.get_by_label("Name of the model").fill(GPT)
    page.get_by_label("Cluster").fill("8xZ9000")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("alert").get_by_text("Z9000").wait_for()
    assert page.evaluate("document.activeElement.id") == "cluster"
    assert page.get_by_label("Cluster").get_attribute("aria-invalid") == "true"
    faults.clear()  # the browser itself reports the status 422
    page.get_by_label("Cluster").fill("8xA100-80GB")
    page.get_by_label("Global batch").fill("64")
    page.get_by_label("Precision").select_option("bf16")
    page.get_by_label("Budget").fill("300")
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    # By keyboard alone.
    page.get_by_label("Budget").press("Enter")
    page.get_by_role("heading", name="Search", exact=True).wait_for()
    # The search is shown while it goes on, each searcher for itself.
    page.get_by_role("img", name="Best step time of each searcher").wait_for()
    page.get_by_role("row", name="mcmc").get_by_text("1,000").wait_for()
    assert page.locator("svg.chart path").count() == 2
    assert page.get_by_text("running", exact=True).is_visible()
    may_end.set()
    page.get_by_role("heading", name="Plan:").wait_for()
    page.get_by_role("img", name="What each pipeline rank does in a step").wait_for()
    thread.join()
    (job,), _ = store.jobs(1)
    plan = store.plan(job.id)
    assert plan is not None
    shown = page.locator("main").inner_text()
    for line in plan["why"]:
        assert line in shown
    sizes = page.locator("figure img").evaluate_all("images => images.map(i => i.naturalWidth)")
    assert len(sizes) == 6 and all(sizes)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download plan.json").click()
    download.value.save_as(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    page.get_by_label("Configuration of a trainer").select_option("deepspeed")
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download deepspeed.json").click()
    download.value.save_as(tmp_path / "deepspeed.json")
    assert json.loads((tmp_path / "deepspeed.json").read_text())["train_batch_size"] == 64
    # The list, and everything it links to, by the keyboard.
    page.get_by_role("link", name="Jobs").click()
    page.get_by_role("link", name=GPT).focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Plan:").wait_for()
    assert not faults
    assert {httpx.URL(url).host for url in asked if not url.startswith(("data:", "blob:"))} == {api.base_url.host}
    context.close()


@pytest.mark.slow
def test_the_text_of_a_cluster_file_is_a_cluster(browser: Any, api: httpx.Client, store: Store) -> None:
    document = parse_cluster("2x2xA100-80GB@40Gbit").to_json()
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{api.base_url}/#/new")
    page.get_by_label("Name of the model").fill(GPT)
    page.get_by_label("Cluster").fill(json.dumps(document)[:-1])
    page.get_by_role("button", name="Search").click()
    page.get_by_role("alert").get_by_text("cannot be read as JSON").wait_for()
    assert page.evaluate("document.activeElement.id") == "cluster" and not store.active()
    page.get_by_label("Cluster").fill(json.dumps(document))
    page.get_by_role("button", name="Search").click()
    page.get_by_text("queued", exact=True).wait_for()
    (job,) = store.active()
    assert job.request is not None and job.request.cluster == document
    context.close()


@pytest.mark.slow
def test_a_file_with_symbolic_dims(browser: Any, api: httpx.Client, store: Store) -> None:
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.goto(f"{api.base_url}/#/new")
    page.get_by_label("a file").check()
    content = {"name": "tiny.onnx", "mimeType": "application/octet-stream", "buffer": mlp("n", "width")}
    page.get_by_label("ONNX file").set_input_files(content)
    page.get_by_label("Cluster").fill("8xA100-80GB")
    page.get_by_role("button", name="Search").click()
    # What is missing is named, and its field has the focus.
    page.get_by_role("alert").get_by_text("symbolic").wait_for()
    assert page.evaluate("document.activeElement.id") == "dims"
    page.get_by_label("Sizes of symbolic dims").fill("width=8, n=1")
    page.get_by_label("Batch dims").fill("x=0")
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**/#/jobs/*")
    (job,), _ = store.jobs(1)
    assert job.request is not None
    assert (job.request.model.name, job.request.model.dims) == ("tiny", {"width": 8, "n": 1})
    assert job.request.model.batch_dims == {"x": 0}


@pytest.mark.slow
def test_a_limit_says_what_to_do(browser: Any, settings: Settings, client: redis.Redis, serve_app: Any) -> None:
    with serve_app(settings.model_copy(update={"max_model_bytes": 1 << 20}), client) as small:
        page = browser.new_page()
        page.set_default_timeout(20_000)
        page.goto(f"{small.base_url}/#/new")
        page.get_by_label("a file").check()
        content = {"name": "big.onnx", "mimeType": "application/octet-stream", "buffer": bytes((1 << 20) + 1)}
        page.get_by_label("ONNX file").set_input_files(content)
        page.get_by_role("button", name="Search").click()
        fault = page.locator("main").get_by_role("alert")
        fault.get_by_text("Send at most 1048576 bytes (1 MiB); `automap strip`").wait_for()
        assert fault.inner_text().count("The body is too large") == 1
        assert page.evaluate("document.activeElement.id") == "file"
        page.close()


@pytest.mark.slow
def test_where_a_key_is_needed_it_is_asked_for(
    browser: Any, settings: Settings, client: redis.Redis, serve_app: Any
) -> None:
    text, _ = Keys(client).create("a", ["read"])
    with serve_app(settings.model_copy(update={"require_keys": True}), client) as locked:
        context = browser.new_context(color_scheme="light")
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(str(locked.base_url))
        page.get_by_role("dialog").wait_for()
        page.get_by_label("Key", exact=True).fill("amk_wrong")
        page.get_by_role("button", name="Use it").click()
        # It is refused, and asked for again; the right one opens the list.
        refused = page.get_by_role("dialog").get_by_role("alert")
        refused.get_by_text("This is not a key of AutoMAP: a part of it may be missing.", exact=True).wait_for()
        page.get_by_label("Key", exact=True).fill(text)
        page.keyboard.press("Enter")
        page.get_by_text("There are no jobs yet.").wait_for()
        # It is kept for this tab alone, and stands nowhere on the page.
        assert page.evaluate("localStorage.length") == 0
        assert text not in page.content()
        context.close()


@pytest.mark.slow
def test_jobs_that_ended_without_a_plan_and_many_jobs(browser: Any, api: httpx.Client, store: Store) -> None:
    asked = {"zoo": GPT, "cluster": "8xA100-80GB", "training": {"global_batch": 64}, "budget": "300"}
    ids = [api.post("/v1/jobs", json={**asked, "seed": seed}).json()["id"] for seed in range(51)]
    assert api.post(f"/v1/jobs/{ids[0]}/cancel").status_code == 200
    page = browser.new_context(viewport={"width": 375, "height": 740}).new_page()
    page.set_default_timeout(60_000)
    # A job that was cancelled says what came of it, with its settings and without a bar that is full.
    page.goto(f"{api.base_url}/#/jobs/{ids[0]}")
    page.get_by_text("The search had not begun.").wait_for()
    page.get_by_text("64 samples a step, budget 300 plans").wait_for()
    assert page.locator("progress").evaluate("bar => bar.value") == 0
    assert page.locator("progress").get_attribute("aria-valuetext") == "0 %", "what a screen reader says"
    # The link past the header leads into the page, and not to another one.
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith(f"#/jobs/{ids[0]}")
    # Of more jobs than a page has the older ones have a page of their own, and only the page shown is asked for.
    asked_for: list[str] = []
    page.on("request", lambda request: asked_for.append(request.url.partition("?")[2]))
    page.get_by_role("link", name="Jobs").click()
    page.get_by_role("link", name="Older jobs").click()
    page.locator(f'a[href="#/jobs/{ids[0]}"]').wait_for()
    assert page.locator("tbody tr").count() == 1
    assert page.get_by_role("link", name="Older jobs").is_hidden()
    page.go_back()
    page.locator("tbody tr").nth(49).wait_for()
    assert page.get_by_role("link", name="Newest jobs").is_hidden()
    assert all(query.startswith("limit=50") for query in asked_for if query)
    # However long a name is, the state of its job is seen beside it, and it does not turn other text around.
    api.post("/v1/jobs", json={**asked, "seed": 98, "name": "\u202e\n" + "name" * 120})
    named = page.locator("tbody tr").filter(has_text="\\u202e\\u000a" + "name" * 120)
    named.wait_for()
    assert named.locator(".state").evaluate("state => state.getBoundingClientRect().right") < 375
    # A service that is away for a moment is asked again.
    page.route("**/v1/jobs?*", lambda route: route.abort())
    page.get_by_text("The page tries again").wait_for()
    page.unroute("**/v1/jobs?*")
    page.get_by_text("The page tries again").wait_for(state="detached")
    # Who tabs through the list, or has moved it to the side, is not thrown out where it changes.
    held = page.locator(f'a[href="#/jobs/{ids[40]}"]')
    held.focus()
    moved = page.locator(".wide").evaluate("wide => { wide.scrollLeft = 60; return wide.scrollLeft; }")
    last = api.post("/v1/jobs", json={**asked, "seed": 99}).json()["id"]
    page.locator(f'a[href="#/jobs/{last}"]').wait_for()
    assert moved > 0 and page.locator(".wide").evaluate("wide => wide.scrollLeft") == moved
    assert held.evaluate("link => link === document.activeElement")


@pytest.mark.slow
def test_jobs_that_no_worker_will_run_are_told(
    browser: Any, api: httpx.Client, settings: Settings, client: redis.Redis
) -> None:
    asked = {"zoo": GPT, "cluster": "8xA100-80GB", "training": {"global_batch": 64}, "budget": "300"}
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.goto(str(api.base_url))
    page.get_by_text("There are no jobs yet.").wait_for()
    said = page.get_by_role("status").get_by_text("The service has no worker now.")
    assert said.count() == 0, "no job waits"
    job_id = api.post("/v1/jobs", json=asked).json()["id"]
    said.wait_for()
    worker = Worker(client, settings)
    worker.register_birth()
    said.wait_for(state="detached")
    # The page of a job says the same.
    worker.register_death()
    page.goto(f"{api.base_url}/#/jobs/{job_id}")
    said.wait_for()
    assert api.post(f"/v1/jobs/{job_id}/cancel").status_code == 200
    page.get_by_text("The search had not begun.").wait_for()
    said.wait_for(state="detached")
    page.close()


@pytest.mark.slow
def test_a_slow_answer_is_waited_for_in_words(browser: Any, api: httpx.Client) -> None:
    asked = {"zoo": GPT, "cluster": "8xA100-80GB", "training": {"global_batch": 64}, "budget": "300"}
    job_id = api.post("/v1/jobs", json=asked).json()["id"]
    page = browser.new_page()
    page.set_default_timeout(20_000)
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    shown = """([place]) => {
      const said = getComputedStyle(document.querySelector(place), "::after");
      return said.visibility === "visible" && said.content;
    }"""
    page.goto(f"{api.base_url}/#/new")
    page.get_by_label("Cluster").wait_for()
    for address, place, then in (
        ("#/", "#main > div > .awaited", page.get_by_text("The latest jobs")),
        (f"#/jobs/{job_id}", "#main > .awaited", page.get_by_role("button", name="Cancel the job")),
    ):
        page.route(re.compile(r"/v1/jobs(\?|/\w+$)"), hold)
        page.evaluate("(address) => { location.hash = address; }", address)
        assert page.wait_for_function(shown, arg=[place]).json_value() == '"Loading …"'
        (route,) = held
        route.continue_()
        page.unroute_all()
        held.clear()
        then.wait_for()
        assert page.locator(f"{place}:empty").count() == 0
    page.close()


@pytest.mark.slow
def test_jobs_of_one_state(browser: Any, api: httpx.Client) -> None:
    asked = {"zoo": GPT, "cluster": "8xA100-80GB", "training": {"global_batch": 64}, "budget": "300"}
    ids = [api.post("/v1/jobs", json={**asked, "seed": seed}).json()["id"] for seed in range(54)]
    for job_id in ids[:51]:
        assert api.post(f"/v1/jobs/{job_id}/cancel").status_code == 200
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.goto(str(api.base_url))
    # The list of all jobs has as many rows, so one that only it has must go first.
    page.locator(f'a[href="#/jobs/{ids[50]}"]').wait_for()
    page.get_by_role("link", name="not ended").click()
    page.locator(f'a[href="#/jobs/{ids[50]}"]').wait_for(state="detached")
    page.locator("tbody tr").nth(2).wait_for()
    assert page.locator("tbody tr").count() == 3
    assert page.locator("[aria-current]").all_inner_texts() == ["not ended"]
    page.get_by_role("link", name="cancelled").click()
    page.get_by_role("link", name="Older jobs").click()
    page.locator(f'a[href="#/jobs/{ids[0]}"]').wait_for()
    assert page.locator("tbody tr").count() == 1
    page.get_by_role("link", name="Newest jobs").click()
    page.locator("tbody tr").nth(49).wait_for()
    page.get_by_role("link", name="failed").click()
    page.get_by_text("There are no such jobs.").wait_for()
    # An address with a state that there is not: the fault is said, and nothing is waited for any more.
    page.goto(f"{api.base_url}/#/state/lost")
    page.get_by_role("alert").get_by_text("lost").wait_for()
    assert page.locator(".awaited:empty").count() == 0
    page.close()


@pytest.mark.slow
def test_a_job_is_shown_again_when_the_service_is_back(browser: Any, api: httpx.Client, store: Store) -> None:
    asked = {"zoo": GPT, "cluster": "8xA100-80GB", "training": {"global_batch": 64}, "budget": "300"}
    job_id = api.post("/v1/jobs", json=asked).json()["id"]
    page = browser.new_page()
    page.set_default_timeout(20_000)
    # Opened while nothing answers, also not a proxy in front of it.
    page.goto(str(api.base_url))
    page.get_by_text("The latest jobs").wait_for()
    page.route("**/v1/**", lambda route: route.fulfill(status=502, body="<html>Bad Gateway</html>"))
    page.route("**/readyz", lambda route: route.abort())
    page.locator(f'a[href="#/jobs/{job_id}"]').click()
    page.get_by_role("heading", name="This page cannot be shown").wait_for()
    page.get_by_role("alert").get_by_text("The page tries again").wait_for()
    page.unroute("**/v1/**")
    page.unroute("**/readyz")
    page.get_by_text("64 samples a step").wait_for()
    # While it is watched.
    page.get_by_role("link", name="Jobs").click()
    page.route("**/events", lambda route: route.abort())
    page.locator(f'a[href="#/jobs/{job_id}"]').click()
    page.get_by_role("status").get_by_text("tries again until it does").wait_for()
    page.unroute("**/events")
    page.get_by_text("tries again until it does").wait_for(state="detached")
    page.close()


@pytest.mark.slow
def test_a_job_is_cancelled_by_the_keyboard(browser: Any, api: httpx.Client, store: Store) -> None:
    asked = {"zoo": GPT, "cluster": "8xA100-80GB", "training": {"global_batch": 64}, "budget": "300"}
    job_id = api.post("/v1/jobs", json=asked).json()["id"]
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.goto(f"{api.base_url}/#/jobs/{job_id}")
    button = page.get_by_role("button", name="Cancel the job")
    button.focus()
    # The focus stays where it is when the job begins, and goes to the page when its button is gone.
    store.begin(job_id)
    page.get_by_text("running", exact=True).wait_for()
    assert button.evaluate("button => button === document.activeElement")
    page.keyboard.press("Enter")
    page.get_by_text("cancelled", exact=True).wait_for()
    page.locator("#main:focus").wait_for()
    assert store.state(job_id) == "cancelled"
    page.close()


@pytest.mark.slow
def test_a_search_whose_answer_was_lost_is_begun_once(browser: Any, api: httpx.Client, store: Store) -> None:
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.goto(f"{api.base_url}/#/new")
    page.get_by_label("Name of the model").fill(GPT)

    def lose(route: Any) -> None:
        route.fetch()
        route.abort()

    page.route("**/v1/jobs", lose)
    page.get_by_role("button", name="Search").click()
    page.get_by_role("alert").get_by_text("does not answer").wait_for()
    page.unroute("**/v1/jobs")
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**/#/jobs/*")
    assert len(store.jobs(10)[0]) == 1
    # The same search a second time, from a new form, is meant.
    page.get_by_role("link", name="New search").click()
    page.get_by_label("Name of the model").fill(GPT)
    page.get_by_role("button", name="Search").click()
    page.wait_for_url("**/#/jobs/*")
    assert len(store.jobs(10)[0]) == 2
    page.close()


@pytest.mark.slow
def test_a_search_that_has_ended_is_told_in_its_order(
    browser: Any, api: httpx.Client, client: redis.Redis, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "_PACE_S", 0.0)  # every report is written
    asked = {"zoo": GPT, "cluster": "8xA100-80GB", "training": {"global_batch": 64}, "budget": "300"}
    job_id = api.post("/v1/jobs", json=asked).json()["id"]

    def search(problem: Any, budget: Any, *, on_progress: Any, **rest: Any) -> Any:
        for number in (2, 8, 14, 20):
            on_progress(replace(told(number), seconds=20.0 * number))
        raise NothingFits("nothing fits", field="cluster", value="8", repair="Take more.")

    run(job_id, client, search=search)
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.add_init_script(HEARD)
    page.goto(f"{api.base_url}/#/jobs/{job_id}")
    page.get_by_role("heading", name="Plan", exact=True).wait_for()
    paths = page.locator("svg.chart path").evaluate_all("paths => paths.map((path) => path.getAttribute('d'))")
    assert len(paths) == 2
    for path in paths:
        places = [float(number) for number in re.findall(r"(?<=[MH])[0-9.]+", path)]
        assert places == sorted(places) and places[0] < places[-1], path
    texts = page.locator("svg.chart text").all_text_contents()
    assert {"0 s", "100 s", "200 s", "300 s", "400 s"} <= set(texts)
    # Who cannot see the page does not hear that it waits, and that it runs.
    assert page.evaluate("heard") == []
    # A search that found nothing has no picture: its axes would have no plan to show.
    job_id = api.post("/v1/jobs", json={**asked, "seed": 1}).json()["id"]

    def search_in_vain(problem: Any, budget: Any, *, on_progress: Any, **rest: Any) -> Any:
        nothing = {f"searcher-{number}": Reached(best_step_time_s=None) for number in range(9)}
        nothing["mcmc"] = Reached(evaluations=7, best_step_time_s=None)
        on_progress(replace(told(2), best_step_time_s=None, members=nothing))
        raise NothingFits("nothing fits", field="cluster", value="8", repair="Take more.")

    run(job_id, client, search=search_in_vain)
    page.goto(f"{api.base_url}/#/jobs/{job_id}")
    page.get_by_text("The search had found no plan that fits.").wait_for()
    page.get_by_role("row", name="mcmc").get_by_text("7", exact=True).wait_for()
    page.get_by_text("none fits; no plan takes less").wait_for()
    assert page.locator("svg.chart").count() == 0
    # However many searchers there are, no two have lines of the same look.
    looks = page.locator(".swatch line").evaluate_all(
        "lines => lines.map((line) => line.getAttribute('stroke') + line.getAttribute('stroke-dasharray'))"
    )
    assert len(looks) == len(set(looks)) == 10
    page.close()


@pytest.mark.slow
def test_a_plan_of_gnn_training(browser: Any, api: httpx.Client, client: redis.Redis, tmp_path: Path) -> None:
    problem = make_problem(Shape(machines=3, workers=2, samplers=1))
    job_id = api.post("/v1/gnn/jobs", json={"problem": problem.to_json(), "budget": 40}).json()["id"]
    run(job_id, client)
    plan = api.get(f"/v1/jobs/{job_id}/plan").json()
    page = browser.new_page()
    page.set_default_timeout(20_000)
    faults: list[str] = []
    page.on("pageerror", lambda fault: faults.append(str(fault)))
    page.goto(str(api.base_url))
    page.get_by_role("row", name=problem.name).get_by_text("3 machines", exact=True).wait_for()
    page.get_by_role("link", name=problem.name).click()
    page.get_by_role("heading", name="Plan:").wait_for()
    shown = page.locator("main").inner_text()
    assert all(line in shown for line in plan["why"])
    for machine in {*plan["placement"].values()}:
        tasks = ", ".join(task for task, place in plan["placement"].items() if place == machine)
        assert page.get_by_role("row", name=machine).get_by_text(tasks, exact=True).is_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download plan.json").click()
    download.value.save_as(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    assert not faults
    page.close()

"""The page's server: right answers, and a clear one to everything that is wrong."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

import metadropout as md
from metadropout.bench.page import crowd

testclient = pytest.importorskip("starlette.testclient", reason="no test of the page: starlette is not installed")
MAML, DROPOUT, COLOUR = "omniglot-5way-1shot-maml", "omniglot-5way-1shot-metadropout", "cifar-fs-5way-1shot-maml"


@pytest.fixture
def client(app: Any) -> Any:
    # Not as a context: the application is shared, and leaving one would stop its worker.
    return testclient.TestClient(app, base_url="http://127.0.0.1:8321", raise_server_exceptions=False)


@pytest.fixture
def glyphs(client: Any) -> list[Any]:
    return list(client.get("/api/glyphs?classes=4&examples=2&seed=3").json()["glyphs"])


def question(glyphs: list[Any], **changes: Any) -> dict[str, Any]:
    classes = [[example["image"] for example in glyph["examples"]] for glyph in glyphs]
    queries = [glyph["others"][0]["image"] for glyph in glyphs]
    asked = {"visitor": "me", "weights": [DROPOUT], "samples": 3, "classes": classes, "queries": queries, **changes}
    return {name: value for name, value in asked.items() if value is not None}


def problem(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def as_array(text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(28, 28)


def test_answers_are_those_of_the_estimator(client: Any, glyphs: list[Any]) -> None:
    asked = question(glyphs)
    answer = client.post("/api/classify", json=asked).json()["answers"][0]
    estimator = md.FewShotClassifier(DROPOUT, mc_samples=3, invert=False)
    images = [as_array(image) for images in asked["classes"] for image in images]
    estimator.fit(images, [number for number in range(4) for _ in range(2)])
    expected = estimator.predict_proba([as_array(image) for image in asked["queries"]])
    np.testing.assert_allclose(answer["probabilities"], expected, atol=2e-5)
    assert (np.argmax(answer["probabilities"], axis=1) == np.arange(4)).sum() >= 3


def test_examples_are_sent_once_and_models_adapted_once(client: Any, glyphs: list[Any]) -> None:
    first = client.post("/api/classify", json=question(glyphs, samples=2)).json()
    again = client.post("/api/classify", json=question(glyphs, samples=2, classes=None, task=first["task"])).json()
    assert not first["answers"][0]["known"]
    assert again["answers"][0]["known"]
    assert again["answers"][0]["probabilities"] == first["answers"][0]["probabilities"]
    assert "send them again" in problem(
        client.post("/api/classify", json=question(glyphs, classes=None, task="x")), 410
    )


def test_two_learners_are_asked_together_with_any_steps(client: Any, glyphs: list[Any]) -> None:
    answers = client.post("/api/classify", json=question(glyphs, weights=[MAML, DROPOUT], steps=0)).json()["answers"]
    assert [answer["weights"] for answer in answers] == [MAML, DROPOUT]
    assert answers[0]["samples"] == 1  # MAML draws no noise
    # Without a step all classes are where they started: at the same place.
    np.testing.assert_allclose(answers[0]["probabilities"], 0.25, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": []}, "2 to 20"),
        ({"classes": [["AAAA"]]}, "2 to 20"),
        ({"classes": [["AAAA"], []]}, "class 2 has no example"),
        ({"classes": [["AAAA"], ["AAAA"]]}, "3 bytes, but these weights take images of 1 x 28 x 28 = 784"),
        ({"classes": [["%%"], ["AAAA"]]}, "classes.0.0: is not base64"),
        ({"classes": [["AAAA"]] * 21}, "2 to 20"),
        ({"classes": [["AAAA"] * 10] * 15}, "150 examples; 100 are allowed"),
        ({"classes": [["AAAA"] * 21] * 2}, "classes.0: list should have at most 20 items"),
        ({"classes": "AAAA"}, "classes: input should be a valid array"),
        ({"samples": 0}, "samples: input should be greater than or equal to 1"),
        ({"samples": 1000}, "samples: input should be less than or equal to 100"),
        ({"samples": 2.5}, "samples: input should be a valid integer"),
        ({"steps": 21}, "steps: input should be less than or equal to 20"),
        ({"steps": -1}, "steps: input should be greater"),
        ({"queries": ["A"] * 65}, "queries: list should have at most 64 items"),
        ({"queries": ["A" * 300_000]}, "queries.0: string should have at most"),
        ({"visitor": ""}, "visitor: string should have at least 1"),
        ({"weights": [MAML, COLOUR]}, "images of different sizes"),
        ({"weights": []}, "weights: list should have at least 1"),
        ({"task": "x"}, "either the examples, as classes, or the name of a task"),
        ({"command": "rm"}, "command: extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_right(
    client: Any, glyphs: list[Any], changes: dict[str, Any], said: str
) -> None:
    assert said in problem(client.post("/api/classify", json=question(glyphs, **changes)), 400)


def test_too_much_work_is_refused_with_what_is_allowed(client: Any, glyphs: list[Any]) -> None:
    many = question(glyphs, classes=[[glyphs[0]["examples"][0]["image"]] * 10] * 10, samples=100, steps=20)
    assert "at most 10 samples" in problem(client.post("/api/classify", json=many), 400)


def test_unknown_weights_addresses_methods_and_types_are_refused(client: Any, glyphs: list[Any]) -> None:
    assert DROPOUT in problem(client.post("/api/classify", json=question(glyphs, weights=["other"])), 404)
    assert "no such page" in problem(client.get("/api/nothing"), 404)
    assert "no such page" in problem(client.get("/static/../server.py"), 404)
    assert "another method" in problem(client.get("/api/classify"), 405)
    assert "application/json" in problem(client.post("/api/classify", content="{}"), 415)
    broken = client.post("/api/classify", content="{", headers={"Content-Type": "application/json"})
    assert "invalid JSON" in problem(broken, 400)
    deep = client.post("/api/classify", content="[" * 100_000, headers={"Content-Type": "application/json"})
    assert problem(deep, 400)
    for wrong in ("0", "21", "x", "-1", "9" * 30):
        assert "from 1 to 20" in problem(client.get(f"/api/glyphs?classes={wrong}"), 400)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "10.0.0.1:8321", "["])
def test_a_request_for_another_host_is_refused(client: Any, host: str) -> None:
    assert "on this machine only" in problem(client.get("/api/weights", headers={"Host": host}), 403)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_request_from_another_page_is_refused(client: Any, glyphs: list[Any], headers: dict[str, str]) -> None:
    response = client.post("/api/classify", json=question(glyphs), headers=headers)
    assert "another page" in problem(response, 403)
    assert "access-control-allow-origin" not in response.headers


def test_the_page_itself_may_ask_and_may_do_little_else(client: Any) -> None:
    own = {"Origin": "http://127.0.0.1:8321", "Sec-Fetch-Site": "same-origin"}
    response = client.get("/api/weights", headers=own)
    assert [one["name"] for one in response.json()["weights"]] == [MAML, DROPOUT, COLOUR]
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in page.text
    assert " style=" not in page.text
    assert "//" not in page.text.replace("<!doctype", "")


def test_a_body_of_a_gigabyte_is_refused_before_it_is_sent(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    head = f"POST /api/classify HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as declared:
        declared.sendall(f"{head}Content-Length: {2**30}\r\n\r\n".encode())
        assert b"413" in declared.recv(4096).split(b"\r\n")[0]
    with socket.create_connection((host, int(port)), timeout=10) as chunked:
        chunked.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        sent, chunk = 0, b"100000\r\n" + b" " * 2**20 + b"\r\n"
        try:
            while sent < 1024:
                chunked.sendall(chunk)
                sent += 1
        except OSError:  # the server has closed the connection
            pass
        assert sent < 64  # megabytes: the limit of 8, and what the system's buffers took


def picture(size: tuple[int, int] = (50, 40), kind: str = "PNG", colour: Any = (200, 30, 60)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def send(client: Any, content: bytes, weights: str = COLOUR) -> Any:
    headers = {"Content-Type": "application/octet-stream"}
    return client.post(f"/api/photo?weights={weights}", content=content, headers=headers)


def test_a_photo_is_brought_to_the_shape_of_the_weights(client: Any) -> None:
    answer = send(client, picture()).json()
    pixels = np.frombuffer(base64.b64decode(answer["image"]), np.uint8).reshape(3, 32, 32)
    assert (pixels == np.array([200, 30, 60])[:, None, None]).all()
    assert answer["preview"].startswith("data:image/png;base64,")
    assert (answer["width"], answer["height"]) == (50, 40)


def test_a_polyglot_file_leaves_nothing_but_its_pixels(client: Any) -> None:
    script = b"<script>alert(1)</script>"
    answer = send(client, picture() + script + b"PK\x03\x04").json()
    kept = base64.b64decode(answer["preview"].partition(",")[2])
    assert script not in kept
    assert Image.open(io.BytesIO(kept)).size == (160, 160)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (picture()[:60], "damaged"),
        (b"GIF89a" + bytes(10), "cannot be used"),
    ],
)
def test_a_file_that_is_no_photo_is_refused(client: Any, content: bytes, said: str) -> None:
    assert said in problem(send(client, content), 422)


def test_a_picture_of_thirty_thousand_pixels_a_side_is_refused_undecoded(client: Any) -> None:
    small = picture()
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + small[24:29]  # where a PNG says how large it is
    large = small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]
    assert "more than the 50000000 pixels allowed" in problem(send(client, large), 422)
    assert send(client, picture((30_000, 8), "BMP")).status_code == 200  # long, but small


def test_a_photo_needs_a_type_and_weights(client: Any) -> None:
    assert "octet-stream" in problem(client.post(f"/api/photo?weights={COLOUR}", content=picture()), 415)
    assert "no weights" in problem(send(client, picture(), "none"), 404)


def test_photos_are_classified(client: Any) -> None:
    images = [send(client, picture(colour=colour)).json()["image"] for colour in ((250, 10, 10), (10, 10, 250))]
    asked = question([], weights=[COLOUR], classes=[[image] for image in images], queries=images)
    found = client.post("/api/classify", json=asked).json()["answers"][0]["probabilities"]
    assert np.shape(found) == (2, 2)


def test_boundaries_multipliers_and_features_can_be_seen(client: Any, glyphs: list[Any]) -> None:
    shared = question(glyphs, weights=[MAML, DROPOUT], queries=None)
    others = [[hand["image"] for hand in glyph["others"]] for glyph in glyphs[1:3]]
    asked = shared | {"pair": [1, 2], "others": others, "mine": others[0][0]}
    panels = client.post("/api/boundary", json=asked).json()["panels"]
    for panel, perturbed in zip(panels, (0, 40), strict=True):
        kinds = [point["kind"] for point in panel["points"]]
        assert {kind: kinds.count(kind) for kind in ("support", "perturbed", "query", "mine")} == {
            "support": 4, "perturbed": perturbed, "query": 16, "mine": 1,
        }  # fmt: skip
        assert panel["tested"] == 16
        assert panel["right"] >= 12
        for point in panel["points"]:
            assert (point["x"] > 0) == (point["predicted"] == 0)
    none, some = client.post("/api/multipliers", json=shared).json()["models"]
    assert "multiplies nothing" in none["reason"]
    assert [len(layer["maps"][0]) for layer in some["layers"]] == [8] * len(some["layers"])
    assert (some["layers"][0]["maps"][0][0]["height"], some["layers"][0]["layer"]) == (28, 1)
    none, some = client.post("/api/features", json=shared | {"image": 3}).json()["models"]
    assert "draws none" in none["reason"]
    assert len(some["layers"][0]["channels"][0]["maps"]) == some["samples"] + 2


@pytest.mark.parametrize(
    ("path", "changes", "said"),
    [
        ("boundary", {"pair": [0, 0]}, "two different classes"),
        ("boundary", {"pair": [0, 9]}, "from 0 to 3"),
        ("boundary", {"others": [[]]}, "each of the two classes"),
        ("boundary", {"mine": "AAAA"}, "mine.0: has 3 bytes"),
        ("features", {"image": 8}, "there are 8 examples"),
        ("features", {"image": -1}, "image: input should be greater"),
    ],
)
def test_what_cannot_be_seen_is_said(
    client: Any, glyphs: list[Any], path: str, changes: dict[str, Any], said: str
) -> None:
    assert said in problem(client.post(f"/api/{path}", json=question(glyphs, queries=None) | changes), 400)


def test_moved_copies_stand_in_where_there_are_no_other_images(client: Any, glyphs: list[Any]) -> None:
    (panel,) = client.post("/api/boundary", json=question(glyphs, queries=None)).json()["panels"]
    assert panel["tested"] == 2 * 2 * 8
    assert panel["right"] > 24


def test_a_failure_tells_the_visitor_nothing_of_the_machine(
    client: Any, app: Any, glyphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("/home/secret")

    monkeypatch.setattr(app.state.page.tasks, "adapted", fail)
    response = client.post("/api/classify", json=question(glyphs, samples=7))
    assert "the terminal of the server says what" in problem(response, 500)
    assert "secret" not in response.text


def test_many_clients_at_once_are_all_answered_in_bounded_memory(address: str) -> None:
    port = int(address.rpartition(":")[2])
    statuses, waits, sizes = crowd(port, clients=50, seconds=1, process=os.getpid())  # a minute: see its own command
    assert set(statuses) == {200}
    assert len(waits) >= 50
    assert max(sizes) - sizes[0] < 400  # MB: what is kept of models and tasks, and what the system gives back late


def test_the_list_of_weights_is_json_that_any_browser_reads(client: Any) -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    listed = json.loads(client.get("/api/weights").text, parse_constant=refuse)
    assert listed["limits"]["classes"] == 20
    assert [one["drawings"] for one in listed["weights"]] == [True, True, False]
    assert listed["weights"][1]["steps"] == 5

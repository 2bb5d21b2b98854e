"""``/v1/usage``: the caller's own usage, by hour or day and model, as OpenAI's clients read it."""

import pytest
from quire_router.core.usage import UsageRow

from tests.support.scripted_api import Answer, Stage, ask, open_stage

DAY = 86_400
START = 20_000 * DAY
KEYS = ("key-of-the-shop-1", "key-of-the-lab--1")
ROWS = [
    UsageRow(START, "", "a", 1, 10, 2, 5),
    UsageRow(START, "", "b", 2, 20, 0, 7),
    UsageRow(START + 7_200, "", "a", 4, 40, 8, 20),
    UsageRow(START + 2 * DAY, "", "a", 1, 1, 1, 1),
]


async def read_usage(since: float, until: float, tenant: str) -> list[UsageRow]:
    return [row for row in ROWS if since <= row.hour < until and tenant == row.tenant]


async def usage(stage: Stage, query: str, key: str = "") -> Answer:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await ask(stage.port, "GET", f"/v1/usage?{query}", headers=headers)


def results(bucket: dict) -> list[tuple[str, int, int, int, int]]:
    names = ("model", "num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
    assert {each["object"] for each in bucket["results"]} <= {"organization.usage.completions.result"}
    return [tuple(each[name] for name in names) for each in bucket["results"]]


async def test_buckets_of_a_day_add_up_its_hours():
    async with open_stage(read_usage=read_usage) as stage:
        page = (await usage(stage, f"start_time={START + 5}&end_time={START + 3 * DAY}")).json
        assert page | {"data": []} == {"object": "page", "data": [], "has_more": False, "next_page": None}
        assert [(each["object"], each["start_time"], each["end_time"]) for each in page["data"]] == [
            ("bucket", START + day * DAY, START + (day + 1) * DAY) for day in range(3)
        ]
        assert [results(each) for each in page["data"]] == [
            [("a", 5, 50, 10, 25), ("b", 2, 20, 0, 7)],
            [],
            [("a", 1, 1, 1, 1)],
        ]


async def test_pages_follow_each_other_and_give_every_hour_once():
    async with open_stage(read_usage=read_usage) as stage:
        query, pages, token = f"start_time={START}&end_time={START + 4 * 3600}&bucket_width=1h&limit=3", [], ""
        while token is not None:
            page = (await usage(stage, query + (f"&page={token}" if token else ""))).json
            pages.append([each["start_time"] for each in page["data"]])
            token = page["next_page"]
            assert page["has_more"] == (token is not None)
        assert pages == [[START, START + 3600, START + 7200], [START + 10_800]]


async def test_a_key_shows_its_own_tenants_usage_alone():
    async with open_stage(read_usage=read_usage, keys=KEYS) as stage:
        assert (await usage(stage, f"start_time={START}")).status == 401
        answer = await usage(stage, f"start_time={START}&end_time={START + DAY}", KEYS[0])
        assert [results(each) for each in answer.json["data"]] == [[]]


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("", "start_time"),
        ("start_time=x", "start_time"),
        ("start_time=-1", "start_time"),
        ("start_time=1&bucket_width=1m", "bucket_width"),
        ("start_time=1&limit=0", "limit"),
        ("start_time=1&limit=32", "limit"),
        ("start_time=1&page=x", "page"),
        ("start_time=1&group_by=model", "group_by"),
        ("&".join(f"a{number}=1" for number in range(9)), "start_time"),
    ],
)
async def test_what_cannot_be_read_is_400(query: str, parameter: str):
    async with open_stage(read_usage=read_usage) as stage:
        answer = await usage(stage, query)
        assert (answer.status, answer.error["param"]) == (400, parameter)


async def test_a_range_from_the_beginning_of_time_is_bounded():
    async with open_stage(read_usage=read_usage) as stage:
        page = (await usage(stage, "start_time=0&limit=31")).json
        assert len(page["data"]) == 31
        assert page["has_more"]
        assert (await usage(stage, "start_time=99999999999")).json["data"] == []

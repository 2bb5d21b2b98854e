"""What packages of Python have besides answers to chats: ``endpoints_client.py URL POOLING_URL``, with those of openai
and Cohere.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import cohere
from openai import OpenAI
from scenarios import ENDLESS, FIRST, PARAMETERS, SECOND, run

ASKED = {"model": "tools", "temperature": PARAMETERS["temperature"], "max_output_tokens": PARAMETERS["max_tokens"]}
QUESTION = FIRST[0]["content"]
TEXTS = ["the fox runs", "paris is the capital of france", "a dog"]


def openai_scenarios(client: OpenAI, pooling: OpenAI) -> dict[str, Callable[[], object]]:
    def ended(response: Any) -> Any:
        while response.status in ("queued", "in_progress"):
            time.sleep(0.02)
            response = client.responses.retrieve(response.id)
        return response

    def background() -> object:
        response = ended(client.responses.create(**ASKED, input=QUESTION, background=True))
        return {"text": response.output_text, "status": response.status}

    def cancelled() -> object:
        endless = {**ASKED, "max_output_tokens": ENDLESS["max_tokens"]}
        bias = {"extra_body": {"logit_bias": ENDLESS["logit_bias"]}}
        started = client.responses.create(**endless, **bias, input=QUESTION, background=True)
        return {"status": client.responses.cancel(started.id).status}

    def conversation() -> object:
        made = client.conversations.create(metadata={"topic": "sums"})
        first = client.responses.create(**ASKED, input=QUESTION, conversation=made.id)
        second = client.responses.create(**ASKED, input=SECOND["content"], conversation={"id": made.id})
        items = client.conversations.items.list(made.id, order="asc", limit=3)
        texts = [item.content[0].text for item in items]
        deleted = client.conversations.delete(made.id).deleted
        return {"text": second.output_text, "first": first.output_text, "texts": texts, "deleted": deleted}

    def embeddings() -> object:
        as_base64 = pooling.embeddings.create(model="tools", input=TEXTS[:2])
        as_floats = pooling.embeddings.create(model="tools", input=TEXTS[:2], encoding_format="float")
        return {
            "base64": [each.embedding for each in as_base64.data],
            "float": [each.embedding for each in as_floats.data],
        }

    return {act.__name__: act for act in (background, cancelled, conversation, embeddings)}


def cohere_scenarios(url: str) -> dict[str, Callable[[], object]]:
    client = cohere.ClientV2(api_key="none", base_url=url)

    def reranked() -> object:
        answer = client.rerank(model="tools", query="foxes", documents=TEXTS, top_n=2)
        return {"results": [[each.index, each.relevance_score] for each in answer.results]}

    def embedded() -> object:
        first = cohere.Client(api_key="none", base_url=url)
        answer = first.rerank(model="tools", query="foxes", documents=TEXTS, return_documents=True)
        return {"results": [[each.index, each.document.text] for each in answer.results]}

    return {"reranked": reranked, "with_documents": embedded}


if __name__ == "__main__":
    clients = [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in sys.argv[1:]]
    run({"openai": openai_scenarios(*clients), "cohere": cohere_scenarios(sys.argv[2])})

"""A client of Baton's gRPC API: streams that survive the loss of a router, retries that keep to a budget.

    from baton_client import Client

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=64):
            print(chunk.text, end="", flush=True)

`AsyncClient` is the same with `async`; `AsyncClient.bulk()` sends many calls over one stream. A generated stream goes on where
it was after the connection, or the router behind it, is lost: no token is lost, repeated or changed (docs/grpc.md). Depends on
grpcio and protobuf alone; of Baton it imports the generated stubs and nothing else.
"""

from baton_client.aio import AsyncAnswer, AsyncClient
from baton_client.blocking import Answer, Client
from baton_client.bulk import Bulk
from baton_client.connection import Connection
from baton_client.errors import CallFailed
from baton_client.retry import RetryPolicy

__all__ = ["Answer", "AsyncAnswer", "AsyncClient", "Bulk", "CallFailed", "Client", "Connection", "RetryPolicy"]

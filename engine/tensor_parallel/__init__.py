"""One model computed by several processes of a host, each with its share of every matrix and of the KV heads."""

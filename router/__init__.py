"""The front end: APIs, placement, admission, one request's life, metrics. Loads neither torch nor ray."""

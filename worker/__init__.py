"""What every worker process has: session service, engine thread, KV thread, Ray actor shell, the Role protocol."""

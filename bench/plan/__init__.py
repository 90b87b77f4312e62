"""`baton plan`: which layout of which GPUs serves a traffic within its targets for the least money. docs/planner.md."""

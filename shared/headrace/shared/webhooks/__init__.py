"""Webhooks: who wants to be told of which events, and how they are told (https://www.standardwebhooks.com)."""

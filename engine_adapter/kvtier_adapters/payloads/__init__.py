"""What plugs with foreign keys share: options, a cache for payloads, work in the background."""

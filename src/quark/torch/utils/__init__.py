"""Where users of the peer import helpers from; each is named after what it does elsewhere in this package."""

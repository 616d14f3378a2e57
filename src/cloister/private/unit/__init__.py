"""A sealed unit of several machines: a leader, to which clients seal, and members, whose engines its workers may use."""

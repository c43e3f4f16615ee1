"""Drafts from another machine: frames of the protocol, connections to draft servers, trees that outlive a step."""

"""Other vendors' forms of chat: each converts its request to a chat request, and chat responses back."""

"""Models of Hugging Face and ModelScope: listed, downloaded, checked, and kept in the user's cache."""

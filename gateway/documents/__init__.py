"""The API as documents, generated from the routes and the types of their bodies: OpenAPI and AsyncAPI."""

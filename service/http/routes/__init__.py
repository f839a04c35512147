"""The routes of the REST service, one module a resource."""

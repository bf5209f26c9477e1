"""Can an extension handle a layer? One answer for the dispatcher, the documentation and the tests."""

"""The intermediate representation: data types, the verifier and the codec of plans. numpy and stdlib only."""

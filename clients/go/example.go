// Asks a Kestrel gRPC server about a picture: example ADDRESS PICTURE
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kestrel "example.com/kestrel/gen/kestrelv1"
)

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	// From grpc-go 1.63 on: grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials())).
	connection := must(grpc.Dial(os.Args[1], grpc.WithInsecure()))
	defer connection.Close()
	vision := kestrel.NewVisionServiceClient(connection)
	image := &kestrel.Image{Source: &kestrel.Image_Data{Data: must(os.ReadFile(os.Args[2]))}}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // the deadline of all calls
	defer cancel()

	// A stream: pieces of the answer as they are generated, then the whole.
	question, said := "What is in this image?", ""
	answer := must(vision.Query(ctx, &kestrel.QueryRequest{Question: question, Image: image,
		Sampling: &kestrel.SamplingParams{Temperature: proto.Float32(0)}}))
	fmt.Print("query: ")
	for response, err := answer.Recv(); err != io.EOF; response, err = answer.Recv() {
		fmt.Print(must(response, err).GetDelta().GetText()) // empty for other events
		if completed := response.GetCompleted(); completed != nil {
			fmt.Printf(" (%d tokens)\n", completed.Info.Usage.OutputTokenCount)
			said = completed.Answer
		}
	}

	// A conversation: what was asked and answered before, each message with its texts and images, and a question.
	text := func(text string) *kestrel.ChatPart { return &kestrel.ChatPart{Part: &kestrel.ChatPart_Text{Text: text}} }
	chat := must(vision.CompleteChat(ctx, &kestrel.CompleteChatRequest{Messages: []*kestrel.ChatMessage{
		{Role: kestrel.ChatRole_CHAT_ROLE_USER, Parts: []*kestrel.ChatPart{
			{Part: &kestrel.ChatPart_Image{Image: image}}, text(question)}},
		{Role: kestrel.ChatRole_CHAT_ROLE_ASSISTANT, Parts: []*kestrel.ChatPart{text(said)}},
		{Role: kestrel.ChatRole_CHAT_ROLE_USER, Parts: []*kestrel.ChatPart{text("What color is the star?")}},
	}, Sampling: &kestrel.SamplingParams{Temperature: proto.Float32(0)}}))
	fmt.Println("chat:", chat.Result.Answer)

	found := must(vision.Detect(ctx, &kestrel.DetectRequest{Object: "shape", Image: image}))
	for _, object := range found.Objects {
		fmt.Printf("detect: %.2f %.2f %.2f %.2f\n", object.Box.XMin, object.Box.YMin, object.Box.XMax, object.Box.YMax)
	}

	// The details of a status say why, in words that programs can compare.
	_, err := vision.Detect(ctx, &kestrel.DetectRequest{Object: "shape", Image: image,
		Options: &kestrel.RequestOptions{Model: "other"}})
	for _, detail := range status.Convert(err).Details() {
		if info, is := detail.(*errdetails.ErrorInfo); is {
			fmt.Printf("error: %s: %s\n", info.Reason, status.Convert(err).Message())
		}
	}

	// A deadline that passes, and a cancellation: each frees what the request holds in the server.
	long := &kestrel.QueryRequest{Question: "?", Constraint: &kestrel.Constraint{ // an answer of 900 letters
		Kind: &kestrel.Constraint_Regex{Regex: "[a-z ]{900}"}}}
	short, stop := context.WithTimeout(ctx, 500*time.Millisecond)
	defer stop()
	for answer, err = vision.Query(short, long); err == nil; {
		_, err = answer.Recv()
	}
	fmt.Println("deadline has passed:", status.Code(err) == codes.DeadlineExceeded)

	cancellable, stop := context.WithCancel(ctx)
	for answer, err = vision.Query(cancellable, long); err == nil; stop() {
		_, err = answer.Recv()
	}
	fmt.Println("cancelled:", status.Code(err) == codes.Canceled)
}
